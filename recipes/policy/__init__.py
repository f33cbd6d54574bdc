"""The policy: Megatron-core in Ray actors, and its handle in the driver."""

from recipes.policy.cpu import install

install()  # before any module of this package imports megatron.core
