"""Knowledge distillation between chess networks."""
