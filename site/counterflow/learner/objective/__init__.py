"""The objective: pure functions from log-probs, rewards and masks to a loss and its diagnostics.

In flows a `PolicyBatch` and an `ObjectiveSpec`, out flow a scalar that carries gradient and a `Diagnostics` of floats.
Knows nothing of models, files, processes or configuration.
"""
