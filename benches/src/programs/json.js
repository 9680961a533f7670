(function () {
  const items = [];
  for (let i = 0; i < 900; i++) {
    items.push({ id: i, name: 'item number ' + i, tags: ['alpha', 'beta', 'g"q'], price: i * 1.25, ok: i % 2 === 0, nested: { a: i, b: null } });
  }
  let text = JSON.stringify(items);
  for (let k = 0; k < 20; k++) text = JSON.stringify(JSON.parse(text));
  return text.length;
})()
