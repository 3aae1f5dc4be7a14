"""Serve NVFP4 policies on SGLang: numerics, engine layer, policies, HTTP front-end."""
