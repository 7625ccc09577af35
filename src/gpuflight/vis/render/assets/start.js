/* A page that holds its own data shows it. */
readData().then(begin).catch(failed);
