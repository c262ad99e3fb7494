"""Pipeline parallelism: stages of a model over torch's schedules.

Takes a model on the meta device and where it is to be cut; gives the part that each stage holds, with the names of its
parameters kept. Keeps true: chained stages compute what the whole model computes, through the model's own forward.
"""
