"""What the `grpo` command is given: its arguments, and the data, rewards and tools that they name."""
