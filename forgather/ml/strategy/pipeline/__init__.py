"""Pipeline parallelism: a model is cut into stages that run under torch's pipeline schedules.

A model on the meta device and its cuts determine the stages on each rank. Parameters keep the names that they have in
the model. The chained stages compute what the whole model computes, since each stage runs the model's own forward.
"""
