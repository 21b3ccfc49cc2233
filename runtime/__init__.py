"""Parts that the main modules use: engines, weights, processes, files, the screen. None knows trainer or searcher."""
