"""The page of a comparison: an HTML document that needs no network. `uPlot` (MIT) draws the curves."""
