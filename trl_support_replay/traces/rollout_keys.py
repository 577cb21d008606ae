"""The keys under which a `rollout_func` returns supports and routes."""

ROLLOUT_KEY = "support_ids"
"""Key under which a `rollout_func` returns supports: for each completion, one list of ids (or an empty one) a token."""

ROUTES_KEY = "routed_experts"
"""Key under which a `rollout_func` returns routes: for each completion, `RoutedExperts` of all its tokens."""
