"""Built-in HTTP endpoints by topic; `nestrec.serving.http.routes` lists them."""
