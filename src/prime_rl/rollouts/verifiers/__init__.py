"""Environments of the verifiers library: classic ones and v1 tasksets."""
