"""Pure scheduling: state in, decision out. No torch, no I/O, no clock."""

from corogen.schedule.blocks import BlockPool
from corogen.schedule.scheduler import Plan, Scheduler
from corogen.schedule.sequence import Sequence, Status

__all__ = ["BlockPool", "Plan", "Scheduler", "Sequence", "Status"]
