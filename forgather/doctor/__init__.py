"""The doctor: small checks of a machine, and of several machines together, before a run is started on them.

A check takes plain facts, such as an environment or a folder, and returns a `CheckResult`. `survey.py` runs the checks
of one machine, and `meeting.py` those between machines.
"""
