"""Pipeline parallelism: a model cut into stages that run under torch's schedules.

Takes a model on the meta device and the cuts; gives the stages of each rank, with the model's own parameter names. The
chained stages compute what the whole model computes, since each runs the model's own forward.
"""
