"""Tensors, steps and files of a training run; knows no task."""
