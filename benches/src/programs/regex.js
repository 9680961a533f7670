(function () {
  let text = '';
  for (let i = 0; i < 5000; i++) text += '2024-0' + (i % 9 + 1) + '-1' + (i % 10) + ' user' + i + '@example.com GET /path/' + i + '?q=1 200\n';
  let length = 0;
  for (const found of text.matchAll(/(\d{4})-(\d\d)-(\d\d) (\w+)@(\w+)\.com GET (\S+) (\d+)/g)) length += found[6].length;
  return length + text.replace(/\d+/g, '#').length;
})()
