"""What a run would do and need, found without weights, data or network: `grpo --dry_run`."""
