"""Programs for work on nri-gpu: what makes the files that are checked in and generated."""
