def test_address_of_the_page_has_its_key_on_a_terminal() -> None:
    progress = Progress(address="http://127.0.0.1:8000")
    assert progress.page == "http://127.0.0.1:8000/"
    progress.key = "secret"
    assert progress.page == "http://127.0.0.1:8000/#key=secret"
