"""The live dashboard: a local web server that reads run folders and never writes to them.

`folders` finds runs. `index` copies the data for tables and plots of a run into a database in a
temporary folder, and `indexer` keeps these databases up to date. `summary`, `table`, `tokens` and
others compute answers to requests, and `server` sends them. The browser's pages are plain files in
`static`, without a build step. docs/dashboard.md explains the pages and the paths of requests.
"""
