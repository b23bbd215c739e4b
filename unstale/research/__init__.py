"""An annex for experiments: comparisons of runs, studies, and the probe of distillation.

The core never imports it. `unstale.config.plugins` finds what it adds.
"""
