"""A server for Tinker's SDK: training and sampling of LoRA adapters over HTTP."""
