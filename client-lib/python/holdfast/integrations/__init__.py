"""Holdfast in frameworks that own the training loop: one module each, imported by name.

    from holdfast.integrations.transformers import HoldfastCallback

No module here is imported before it is asked for, and none belongs to the dependencies of holdfast.
"""
