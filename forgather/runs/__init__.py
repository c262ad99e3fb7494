"""Many runs: what is read, listed and compared of the folders of past and present runs. Never imports torch."""
