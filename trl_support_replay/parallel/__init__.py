"""Several processes: what one of them meets all learn of, and policies split over them by tensor parallelism."""
