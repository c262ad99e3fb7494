"""The planner's data: memory, hardware and time of a run as plain values, without torch."""
