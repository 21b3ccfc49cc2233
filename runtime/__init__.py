"""What the heart stands on: engines, weights, processes, files, the screen. Nothing here knows trainer or searcher."""
