"""What a user sets, what it does to sampling, and what is refused."""
