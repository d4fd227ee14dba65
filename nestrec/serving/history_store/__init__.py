"""History store: the events of users, which the server stores for requests without a history."""
