"""The trainer: full finetuning over N ranks. Verbs: forward_backward, optim_step, publish, save."""
