"""What a model is: a folder, or a Hugging Face repository at a commit, read without its weights;
and its download."""
