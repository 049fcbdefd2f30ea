"""Where tasks come from (files, procedural sources) and in which order."""

from services.common.data.order import task_index
from services.common.data.record import TaskRecord, TaskSource
from services.common.data.source import open_source

__all__ = ["TaskRecord", "TaskSource", "open_source", "task_index"]
