"""The planner: memory and time of a run, computed from its config before it starts."""
