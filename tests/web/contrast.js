// Texts of the page whose contrast to what is behind them is below 4.5:1, or 3:1 for large ones.
() => {
  const parse = (text) => (text.match(/[\d.]+/g) || [0, 0, 0, 0]).map(Number);
  const over = ([r, g, b, a = 1], [R, G, B]) => [r * a + R * (1 - a), g * a + G * (1 - a), b * a + B * (1 - a)];
  const light = (rgb) => { const [r, g, b] = rgb.map((v) => ((v /= 255) <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)); return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
  const behind = (element) => {
    const layers = [];
    for (let e = element; e; e = e.parentElement) layers.push(parse(getComputedStyle(e).backgroundColor));
    return layers.reverse().reduce((below, layer) => over(layer.length < 4 ? [...layer, 1] : layer, below), [255, 255, 255]);
  };
  const found = new Map();
  const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walk.nextNode()) {
    const element = walk.currentNode.parentElement;
    if (!walk.currentNode.data.trim() || !element.checkVisibility({ visibilityProperty: true, opacityProperty: true }) || element.closest("script, style, .hide, [disabled], option")) continue;
    const style = getComputedStyle(element);
    const drawn = element instanceof SVGElement;
    if (drawn && element.classList.contains("inbar")) continue; // stands on a bar, not on the page: the palette is tested
    const back = behind(element);
    const ink = over(parse(drawn ? style.fill : style.color).concat(1).slice(0, 4), back);
    const [a, b] = [light(ink), light(back)].sort((x, y) => y - x);
    const ratio = (a + 0.05) / (b + 0.05);
    const size = parseFloat(style.fontSize);
    const enough = size >= 24 || (size >= 18.5 && Number(style.fontWeight) >= 600) ? 3 : 4.5;
    if (ratio < enough) found.set(`${element.className?.baseVal ?? element.className}: ${walk.currentNode.data.trim().slice(0, 40)}`, ratio.toFixed(2));
  }
  return [...found].map(([what, ratio]) => `${ratio} ${what}`);
}
