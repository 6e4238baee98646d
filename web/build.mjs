// Builds src/trimtab/observe/web/app.js and app.css. The same sources give the same bytes: no dates, no paths, no hashes of the machine.
import { build } from "esbuild";
import { readFile, writeFile } from "node:fs/promises";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";

const here = dirname(fileURLToPath(import.meta.url));
const target = process.argv[2] ?? join(here, "../src/trimtab/observe/web");

// The pages may name no outside address. An element cannot be made in SVG without its namespace, so that one stays; the other two that Preact
// knows are the page's own namespace, which the page can tell, and MathML's, which nothing here uses.
const SVG = "http://www.w3.org/2000/svg";
const namespaces = {
  name: "namespaces",
  setup(plugin) {
    plugin.onLoad({ filter: /node_modules\/preact\/.*\.m?js$/ }, async ({ path }) => {
      const text = await readFile(path, "utf8");
      const quoted = (address) => new RegExp(`(["'\`])${address.replaceAll("/", "\\/")}\\1`, "g");
      const contents = text
        .replace(quoted("http://www.w3.org/1999/xhtml"), "document.documentElement.namespaceURI")
        .replace(quoted("http://www.w3.org/1998/Math/MathML"), '""');
      return { contents, loader: "js" };
    });
  },
};

const result = await build({
  absWorkingDir: here,
  entryPoints: { app: "src/main.tsx" },
  outdir: target,
  write: false,
  bundle: true,
  minify: true,
  format: "iife",
  target: ["chrome111", "firefox113", "safari16.4"],
  charset: "ascii",
  legalComments: "none",
  jsx: "automatic",
  jsxImportSource: "preact",
  plugins: [namespaces],
  loader: { ".css": "css" },
});

for (const file of result.outputFiles) {
  // "</script" in the script would end it early inside the report; the minifier writes it as "<\/script", and this makes sure.
  if (/<\/(script|style)/i.test(file.text)) throw new Error(`${file.path} holds a closing tag`);
  const outside = file.text.replaceAll(SVG, "").match(/https?:\/\/.{0,60}/);
  if (outside) throw new Error(`${file.path} names an outside address: ${outside[0]}`);
  await writeFile(file.path, file.contents);
  console.log(`${file.path.split("/").at(-1)}: ${(file.contents.length / 1000).toFixed(1)} kB`);
}

const packages = ["preact", "@preact/signals", "@preact/signals-core", "uplot"];
const licences = await Promise.all(
  packages.map(async (name) => {
    const folder = join(here, "node_modules", name);
    const { version, license } = JSON.parse(await readFile(join(folder, "package.json"), "utf8"));
    const text = await readFile(join(folder, "LICENSE"), "utf8");
    return `${name} ${version}, ${license}\n\n${text.trim()}\n`;
  }),
);
const head = "app.js and app.css hold parts of these packages:\n\n";
await writeFile(join(target, "THIRD_PARTY_LICENSES"), head + licences.join(`\n${"-".repeat(80)}\n\n`));
