// The data of a report, which stands in the page itself.

const data = JSON.parse(document.getElementById('data').textContent);
