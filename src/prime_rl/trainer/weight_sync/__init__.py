"""Publishing versions of the policy while training continues (docs/design/weight_sync.md)."""
