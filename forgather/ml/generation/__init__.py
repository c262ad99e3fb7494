"""Text generation with a trained model: prompts, the model of a folder, and answers."""
