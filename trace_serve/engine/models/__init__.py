"""The model classes that NVFP4 policies use, as SGLang's external model packages.

With an external package SGLang defers importing its other model files, which is most of an engine's start-up time; a
model that is not listed here still loads, later. Every module of a package is imported at start, so a family that
imports much has a package of its own (`architectures` says which one a model wants).
"""
