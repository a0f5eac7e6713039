"""Other ResNets than v1.5: each function takes a `models.ResNet` and returns it with other parts.

They can be applied to each other's results, as far as `benchmarks.resnet.architecture` says. Its
table imports a variant where a recipe names it.
"""
