"""What is wrong with settings, before anything is made of them. Each check gets the groups that it is about."""
