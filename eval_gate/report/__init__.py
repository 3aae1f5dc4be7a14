"""Renderers of a verdict: terminal, HTML, Markdown, JUnit. They read only the verdict, and decide nothing."""
