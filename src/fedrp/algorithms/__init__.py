"""What is computed and what is released. The table of all algorithms is in `fedrp.algorithms.table`."""
