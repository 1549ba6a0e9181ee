from oasr_client.cli import main

if __name__ == "__main__":
    main()
