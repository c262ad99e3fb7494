"""What a config calls the project's own: a callback that a user would have written."""

from transformers import TrainerCallback


class ResourceMonitorCallback(TrainerCallback):
    def __init__(self, gpu_memory_threshold, alert_on_imbalance):
        self.gpu_memory_threshold = gpu_memory_threshold
        self.alert_on_imbalance = alert_on_imbalance
