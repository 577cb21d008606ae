"""TRL's GRPO and RLOO trainers with replay in place."""
