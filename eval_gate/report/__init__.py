"""Renderers of a verdict: terminal, HTML, Markdown. They read the verdict and nothing else, and decide nothing."""
