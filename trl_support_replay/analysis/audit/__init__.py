"""Where the gap between training and rollout comes from, token by token."""

from .loading import AuditTraces, load_traces
from .run import Audit, audit_traces

__all__ = ["Audit", "AuditTraces", "audit_traces", "load_traces"]
