"""Score the policy on the distribution the sampler really drew from."""

__version__ = "0.1.0"
