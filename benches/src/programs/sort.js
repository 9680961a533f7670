(function () {
  let x = 12345;
  const numbers = [];
  for (let i = 0; i < 100000; i++) {
    x = (x * 1103515245 + 12345) & 0x7fffffff;
    numbers.push(x);
  }
  numbers.sort((p, q) => p - q);
  return numbers[500];
})()
