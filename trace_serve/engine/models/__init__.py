"""The model classes that NVFP4 policies use, as SGLang's external model package.

With an external package SGLang defers importing its other model files, which is most of an engine's start-up time; a
model that is not listed here still loads, later.
"""
