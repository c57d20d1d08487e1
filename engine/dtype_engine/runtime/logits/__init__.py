"""Files with a model's outputs that this program or another runtime wrote, each kind told apart by its content."""
