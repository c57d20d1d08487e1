"""What belongs to other libraries: their private names, what is changed in them for a while, and their output."""
