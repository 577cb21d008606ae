"""The layout of a padded batch: where each recorded token stands, and is predicted."""
